"""Switching versions without a service manager: what is on disk after success, failure and power cuts."""

import re
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pip
import pytest

from deploy import versions
from deploy.versions import Payload, ServiceError, Settings, SetupError, Store

pytestmark = pytest.mark.process

SETTINGS = Settings(torch_index="", wheelhouse="", allow_cuda=False, python="", settle_s=0.0)
CUDA_METADATA = """Metadata-Version: 2.4
Name: torch
Version: 2.13.0
Requires-Dist: filelock
Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"
Requires-Dist: triton==3.7.0; platform_system == "Linux"
"""


@dataclass
class Recorder:
    """A service that comes up unless its version is in `dead`."""

    store: Store
    dead: set[str] = field(default_factory=set)
    meant_to_run: bool = True
    started: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def wanted(self) -> bool:
        return self.meant_to_run

    def restart(self) -> None:
        version = self.store.linked("current")
        assert version is not None
        self.started.append(version)
        if version in self.dead:
            raise ServiceError("it died")

    def alive(self) -> bool:
        return True

    def use(self, directory: Path) -> None:
        self.used.append(directory.name)

    def runtime_dir(self) -> str | None:
        return None


def make_payload(directory: Path, version: str, lock: str = "torch==2.13.0\n", *, answers: bool = True) -> Payload:
    """Return a payload whose application is a command line that knows --help and status."""
    metadata = directory / f"app/port_agent-{version}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Name: port-agent\nVersion: {version}\n")
    package = directory / "app/port_agent/cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(f"def main():\n    return {0 if answers else 1}\n")
    (directory / "requirements.txt").write_text(lock)
    return Payload(directory)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "opt")


def add(store: Store, service: Recorder, payload: Payload) -> str:
    """Install and activate a payload whose dependencies are there already."""
    runtime = store.root / "runtimes" / payload.runtime_id(SETTINGS)
    runtime.mkdir(parents=True, exist_ok=True)
    (runtime / ".complete").touch()
    with store.locked():
        return versions.activate(store, versions.install(store, payload, SETTINGS), service, SETTINGS.settle_s)


def test_first_installation_runs_and_is_confirmed(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    assert (store.linked("current"), store.linked("previous"), store.unconfirmed()) == ("1.0", None, None)
    assert service.started == ["1.0"]


def test_upgrade_keeps_one_version_and_its_runtime(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    for version, lock in (("1.0", "torch==1\n"), ("1.1", "torch==2\n"), ("1.2", "torch==2\n")):
        add(store, service, make_payload(tmp_path / version, version, lock))
    assert (store.linked("current"), store.linked("previous")) == ("1.2", "1.1")
    assert sorted(path.name for path in (store.root / "versions").iterdir()) == ["1.1", "1.2"]
    assert len(list((store.root / "runtimes").iterdir())) == 1, "the runtime of 1.0 went with it"


def test_failed_start_goes_back_and_forgets_nothing(store: Store, tmp_path: Path) -> None:
    service = Recorder(store, dead={"1.2"})
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    add(store, service, make_payload(tmp_path / "b", "1.1"))
    with pytest.raises(ServiceError, match=r"1\.2 was rolled back, 1\.1 runs again: it died"):
        add(store, service, make_payload(tmp_path / "c", "1.2"))
    assert service.started[-2:] == ["1.2", "1.1"]
    assert service.used[-1] == "1.1"
    assert (store.linked("current"), store.linked("previous"), store.unconfirmed()) == ("1.1", "1.0", None)
    assert not store.version("1.2").exists()


def test_version_that_does_not_answer_goes_back(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    mute = make_payload(tmp_path / "b", "1.1")
    front = mute.application / "port_agent/cli/__init__.py"
    front.write_text("import sys\ndef main():\n    return int('status' in sys.argv)\n")
    with pytest.raises(ServiceError, match="does not answer"):
        add(store, service, mute)
    assert store.linked("current") == "1.0"


def test_failed_first_installation_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="it died"):
        add(store, Recorder(store, dead={"1.0"}), make_payload(tmp_path / "a", "1.0"))


def test_version_that_cannot_run_at_all_is_not_switched_to(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    with pytest.raises(SetupError, match="does not run at all"):
        add(store, service, make_payload(tmp_path / "b", "1.1", answers=False))
    assert (store.linked("current"), service.started) == ("1.0", ["1.0"])


def test_stopped_service_stays_stopped_and_on_trial(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    add(store, service, make_payload(tmp_path / "b", "1.1"))
    service.meant_to_run = False
    add(store, service, make_payload(tmp_path / "c", "1.2"))
    assert service.started == ["1.0", "1.1"]
    assert (store.linked("current"), store.unconfirmed()) == ("1.2", "1.2")
    assert versions.rollback(store, service, only_unconfirmed=True) == "went back from 1.2 to 1.1"
    assert (store.linked("current"), store.linked("previous"), store.unconfirmed()) == ("1.1", "1.0", None)
    assert "nothing to roll back" in versions.rollback(store, service, only_unconfirmed=True)


def test_an_empty_trial_is_the_crash_it_is(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    for version in ("1.0", "1.1"):
        add(store, service, make_payload(tmp_path / version, version))
    (store.root / "unconfirmed").touch()
    assert store.unconfirmed() == "1.1"
    assert versions.rollback(store, service, only_unconfirmed=True) == "went back from 1.1 to 1.0"
    assert store.unconfirmed() is None


def test_either_line_of_a_trial_is_enough(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    service.meant_to_run = False
    for version in ("1.0", "1.1", "1.2"):
        add(store, service, make_payload(tmp_path / version, version))
    trial = store.root / "unconfirmed"
    first, second = trial.read_bytes().splitlines(keepends=True)
    assert first == second
    for left in (
        first + second,
        b"?" + first[1:] + second,
        first[:-1] + b"?" + second,
        first + second[:-1] + b"?",
        first,
    ):
        trial.write_bytes(left)
        assert (store.unconfirmed(), store.before_trial()) == ("1.2", "1.0")
    trial.write_bytes(b"?" + first[1:] + b"?" + second[1:])
    assert (store.unconfirmed(), store.before_trial()) == ("1.2", None)


def test_a_switch_that_was_cut_off_leaves_what_ran(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Recorder(store)
    for version in ("1.0", "1.1"):
        add(store, service, make_payload(tmp_path / version, version))
    replace_link = versions.replace_link

    def cut(link: Path, target: str) -> None:
        if link.name == "current":
            raise KeyboardInterrupt
        replace_link(link, target)

    monkeypatch.setattr(versions, "replace_link", cut)
    with pytest.raises(KeyboardInterrupt):
        add(store, service, make_payload(tmp_path / "1.2", "1.2"))
    monkeypatch.undo()
    assert (store.linked("current"), store.unconfirmed()) == ("1.1", "1.2")
    assert "1.1 stays" in versions.rollback(store, service, only_unconfirmed=True)
    assert (store.linked("current"), store.linked("previous"), store.unconfirmed()) == ("1.1", "1.0", None)


def test_same_version_again_replaces_itself(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    payload = make_payload(tmp_path / "a", "1.0")
    add(store, service, payload)
    add(store, service, payload)
    current = store.linked("current")
    assert current is not None and current.startswith("1.0+")
    assert store.linked("previous") == "1.0"


def test_power_cut_while_installing_leaves_the_old_version(store: Store, tmp_path: Path) -> None:
    service = Recorder(store)
    add(store, service, make_payload(tmp_path / "a", "1.0"))
    half = store.version("1.1")
    (half / "bin").mkdir(parents=True)
    assert store.linked("current") == "1.0"
    add(store, service, make_payload(tmp_path / "b", "1.1"))
    assert (half / "installed.json").exists(), "the half-written directory was replaced"


def test_half_written_runtime_is_not_used(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = make_payload(tmp_path / "a", "1.0")
    (tmp_path / "a/pip-1-py3-none-any.whl").touch()
    runtime = store.root / "runtimes" / payload.runtime_id(SETTINGS)
    (runtime / "torch").mkdir(parents=True)

    def fail(command: list[str], settings: Settings) -> None:
        raise SetupError("no network")

    monkeypatch.setattr(versions, "run_pip", fail)
    with pytest.raises(SetupError, match="no network"):
        versions.install(store, payload, SETTINGS)
    assert not (runtime / "torch").exists()


def test_cuda_build_of_torch_is_refused_and_removed(store: Store, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    metadata = runtime / "torch-2.13.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(CUDA_METADATA)
    versions.refuse_cuda(runtime, Settings("", "", True, "", 0.0))
    with pytest.raises(SetupError, match="this torch is a CUDA build"):
        versions.check_cpu_build(runtime, SETTINGS)
    assert runtime.exists()
    with pytest.raises(SetupError, match="nvidia-cudnn-cu13, triton"):
        versions.refuse_cuda(runtime, SETTINGS)
    assert not runtime.exists()


def test_the_makefile_takes_the_cpu_build_and_refuses_another() -> None:
    recipe = (Path(versions.__file__).parents[1] / "Makefile").read_text()
    fetched = [line for line in recipe.splitlines() if re.search(r"pip install .*torch==", line)]
    assert len(fetched) == 2 and all("--no-deps --index-url" in line for line in fetched)
    assert recipe.count("versions.py cpu-build") == len(fetched)
    assert versions.CPU_TORCH_INDEX in recipe


def write_wheel(directory: Path, name: str, version: str, *, changed: bool = False) -> Path:
    """Write a wheel of one module; `changed`: with another byte in it."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(f"{name}.py"), f"value = {int(changed)}\n")
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/METADATA"), f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return file


def test_a_wheel_of_an_index_that_was_exchanged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but torch, whose own index has other files than the package index."""
    monkeypatch.setattr(versions, "RUNTIME_BYTES", 0)
    payload = payload_with_pip(tmp_path / "a", "torch==0.0.1\nSome.Part==1.2\n")
    wheels = tmp_path / "wheels"
    write_wheel(wheels, "some_part", "1.2")
    lines = versions.wheel_hashes(wheels).replace(" --hash", " \\\n    --hash")
    (payload.directory / versions.INDEX_HASHES).write_text(f"# as uv writes them\n{lines}")
    write_wheel(wheels, "torch", "0.0.1+cpu")
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    versions.ensure_runtime(tmp_path / "good", payload, SETTINGS)
    assert (tmp_path / "good/some_part.py").exists() and (tmp_path / "good/torch.py").exists()
    write_wheel(wheels, "some_part", "1.2", changed=True)
    with pytest.raises(SetupError, match="was damaged or exchanged"):
        versions.ensure_runtime(tmp_path / "bad", payload, SETTINGS)


def payload_with_pip(directory: Path, lock: str) -> Payload:
    """Return a payload that brings the pip of this environment."""
    payload = make_payload(directory, "1.0", lock)
    (directory / "pip-1-py3-none-any.whl").mkdir()
    (directory / "pip-1-py3-none-any.whl/pip").symlink_to(Path(pip.__file__).parent)
    return payload


@pytest.mark.parametrize("bundled", [True, False])
def test_a_wheel_that_was_exchanged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bundled: bool
) -> None:
    monkeypatch.setattr(versions, "RUNTIME_BYTES", 0)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    payload = payload_with_pip(tmp_path / "a", "torch==0.0.1\nSome.Part==1.2\n")
    wheels = payload.directory / "wheelhouse" if bundled else tmp_path / "wheels"
    write_wheel(wheels, "torch", "0.0.1+cpu")
    hashes = payload.directory / "wheelhouse.txt" if bundled else tmp_path / "hashes.txt"
    settings = SETTINGS if bundled else replace(SETTINGS, wheelhouse=str(wheels), hashes=str(hashes))
    hashes.write_text(versions.wheel_hashes(wheels))
    with pytest.raises(SetupError, match="no hash for some-part"):
        versions.ensure_runtime(tmp_path / "early", payload, settings)
    write_wheel(wheels, "some_part", "1.2")
    hashes.write_text(versions.wheel_hashes(wheels))
    versions.ensure_runtime(tmp_path / "good", payload, settings)
    assert (tmp_path / "good/some_part.py").read_text() == "value = 0\n"
    write_wheel(wheels, "some_part", "1.2", changed=True)
    with pytest.raises(SetupError, match="was damaged or exchanged"):
        versions.ensure_runtime(tmp_path / "bad", payload, settings)
    assert not (tmp_path / "bad/some_part.py").exists() and not (tmp_path / "bad/.complete").exists()


def test_hashes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no wheel"):
        versions.wheel_hashes(tmp_path)
    with pytest.raises(SetupError, match="cannot be read"):
        versions.hashed_lock("torch==2.13.0\n", tmp_path / "none")


def test_settings_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "install.conf"
    file.write_text("# PORT_PYTHON=/no\nPORT_WHEELHOUSE='/srv/wheels'\nPORT_SETTLE_S=9\n")
    found = Settings.read(file, {"PORT_SETTLE_S": "2", "HOME": "/root"})
    assert found == Settings(versions.CPU_TORCH_INDEX, "/srv/wheels", False, "", 2.0)
    shipped = Settings.read(Path(versions.__file__).with_name("install.conf"), {})
    assert shipped == Settings.read(tmp_path / "missing", {}), "the shipped file shows the defaults"


def test_runtime_depends_on_lock_and_kind(tmp_path: Path) -> None:
    one, other = make_payload(tmp_path / "a", "1.0"), make_payload(tmp_path / "b", "1.1")
    changed = make_payload(tmp_path / "c", "1.0", "torch==9\n")
    cuda = Settings("", "", True, "", 0.0)
    assert one.runtime_id(SETTINGS) == other.runtime_id(SETTINGS)
    assert len({one.runtime_id(SETTINGS), changed.runtime_id(SETTINGS), one.runtime_id(cuda)}) == 3


def test_interpreter_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(SetupError, match=r"complete Python 3\.11 or later"):
        versions.choose_python(Settings("", "", False, str(old), 0.0))
