"""Threads, forks, workers of a DataLoader, and memory shared between processes."""

import multiprocessing
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, perceptron, rows, square

FEATURES = Features("workers")


class _Made(Dataset[Any]):
    def __init__(self, kept: Tensor | None = None) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(32, generator=torch.Generator().manual_seed(i))
        return {"x": x if self.kept is None else self.kept[i] + x, "y": i % 8}


def _loaded(loader: Any) -> Any:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for _ in range(2):
        for batch in loader:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model, optimizer)


@FEATURES.add
def loader_in_process() -> Any:
    return _loaded(DataLoader(_Made(), 12, shuffle=True))


@FEATURES.add
def loader_with_workers() -> Any:
    return _loaded(DataLoader(_Made(), 12, shuffle=True, num_workers=2))


@FEATURES.add
def loader_with_persistent_workers() -> Any:
    return _loaded(DataLoader(_Made(), 12, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=3))


@FEATURES.add
def loader_whose_workers_read_evicted_tensors() -> Any:
    return _loaded(DataLoader(_Made(torch.randn(48, 32)), 12, num_workers=2))


@FEATURES.add
def loader_of_a_tensor_data_set() -> Any:
    return _loaded(
        DataLoader(TensorDataset(torch.randn(48, 32), torch.randint(0, 8, (48,))), 12, shuffle=True, drop_last=True)
    )


@FEATURES.add
def loader_with_samplers() -> Any:
    data = ConcatDataset(random_split(TensorDataset(torch.randn(48, 32), torch.randint(0, 8, (48,))), [30, 18]))
    weighted = WeightedRandomSampler(torch.rand(48), 36)
    batches = BatchSampler(RandomSampler(data), 9, drop_last=False)
    return _loaded(DataLoader(data, 12, sampler=weighted)), _loaded(DataLoader(data, batch_sampler=batches))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        for i in range(48):
            yield torch.randn(32, generator=generator), i % 8


@FEATURES.add
def loader_of_a_stream() -> Any:
    return _loaded(DataLoader(_Stream(), 12))


@FEATURES.add
def loader_with_its_own_collation() -> Any:
    def collate(items: Any) -> Any:
        return torch.stack([i["x"] * 2 for i in items]), torch.tensor([i["y"] for i in items])

    return _loaded(DataLoader(_Made(), 10, collate_fn=collate))


@FEATURES.add
def batches_from_a_thread() -> Any:
    ahead: queue.Queue[Any] = queue.Queue(2)
    generator = torch.Generator().manual_seed(9)

    def make() -> None:
        for _ in range(6):
            ahead.put(torch.randn(16, 32, generator=generator))
        ahead.put(None)

    model = perceptron(nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    maker = threading.Thread(target=make)
    maker.start()
    while (x := ahead.get()) is not None:
        square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    maker.join()
    return state(model)


def _steps(model: nn.Module, loss: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for _ in range(4):
        loss(model)
        optimizer.step()
        optimizer.zero_grad()
    return state(model, optimizer)


@FEATURES.add
def backward_in_a_thread() -> Any:
    def loss(m: nn.Module) -> None:
        thread = threading.Thread(target=classify(m).backward)
        thread.start()
        thread.join()

    return _steps(perceptron(), loss)


@FEATURES.add
def forward_in_a_thread() -> Any:
    def loss(m: nn.Module) -> None:
        out: list[Tensor] = []
        thread = threading.Thread(target=lambda: out.append(classify(m)))
        thread.start()
        thread.join()
        out[0].backward()

    return _steps(perceptron(), loss)


@FEATURES.add
def branches_in_a_pool() -> Any:
    pool = ThreadPoolExecutor(2)

    def loss(m: nn.Module) -> None:
        # Of two branches: with three, which thread took one decides in which order gradients are
        # added, in plain PyTorch too.
        parts = list(pool.map(lambda x: m(x), [rows() for _ in range(2)]))
        square(parts).backward()

    try:
        return _steps(perceptron(nn.Tanh()), loss)
    finally:
        pool.shutdown()


@FEATURES.add
def pool_started_before_training() -> Any:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    model = perceptron(nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for _ in range(4):
        pool.submit(lambda: classify(model).backward()).result()
        optimizer.step()
        optimizer.zero_grad()
    pool.shutdown()
    return state(model, optimizer)


@FEATURES.add
def threads_train_models_of_their_own() -> Any:
    def learn(seed: int, results: dict[int, Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(32, 32, generator=generator).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(5):
            (torch.randn(16, 32, generator=generator) @ weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[seed] = weight

    training_begins()
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=learn, args=(seed, results)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


@FEATURES.add
def jit_forks() -> Any:
    def loss(m: nn.Module) -> None:
        futures = [torch.jit.fork(m, rows()) for _ in range(2)]
        square([torch.jit.wait(f) for f in futures]).backward()

    return _steps(perceptron(nn.Tanh()), loss)


def _threaded(count: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return _steps(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8)), lambda m: classify(m).backward())
    finally:
        torch.set_num_threads(before)


for _count in (2, 4):
    FEATURES.named(f"{_count}_threads_in_operators", partial(_threaded, _count))


@FEATURES.add
def forked_child_evaluates() -> Any:
    model, heard = perceptron(nn.Tanh()), []
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for _ in range(3):
        classify(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                os.write(writer, repr(model(torch.ones(4, 32)).sum().item()).encode())
            os._exit(0)
        os.close(writer)
        classify(model).backward()
        os.waitpid(child, 0)
        heard.append(os.read(reader, 100))
        os.close(reader)
    return heard, state(model, optimizer)


def _hogwild(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)


@FEATURES.add
def shared_with_a_process() -> Any:
    model = perceptron(nn.Tanh()).share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    for _ in range(2):
        classify(model).backward()
        optimizer.step()
        process = multiprocessing.get_context("fork").Process(target=_hogwild, args=(model,))
        process.start()
        process.join()
    return state(model)


@FEATURES.add
def timer_looks_at_weights() -> Any:
    model, seen = perceptron(nn.Tanh()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_begins()
    for _ in range(3):
        classify(model).backward()
        optimizer.step()
        timer = threading.Timer(0.0, lambda: seen.append(model[0].weight.detach().clone()))
        timer.start()
        timer.join()
    return seen, state(model)


@FEATURES.add
def data_parallel_on_the_cpu() -> Any:
    return _steps(nn.DataParallel(perceptron(nn.Tanh())), lambda m: classify(m).backward())
