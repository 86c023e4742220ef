// A device 'card' in C++: torch's private backend, whose storages resize, for programs that run inside a budget of its memory.
//
// Operators run by the CPU's kernels on the card's bytes, so bits are the CPU's. The card is as unkind as a real one may be:
//
// - its memory is a file mapped twice: operators use one mapping, addresses of tensors are in the other, which the host may not touch
//   (unless CARD_UNIFIED is set, where both are the host's);
// - memory that is given or freed holds garbage, memory beyond the cap is refused (OutOfMemoryError), and it is given first fit, so it
//   comes in parts;
// - a copy with non_blocking=True from or to pinned memory happens only once someone waits for it: until then garbage lies where it
//   goes, and it brings garbage if it was not ordered behind what wrote its source or used its target;
// - memory that is freed while a stream uses it which the one that asked for it has not waited for is counted as a violation;
// - an operator on one stream that uses what another one wrote, without having waited for it, gives garbage.
//
// Who waits for what, events alone say (vector clocks). The card's lock is never held where a tensor's count of references changes or the
// host's memory is touched: either may wait for Python's lock, whose holder may wait for the card's. Works with torch 2.13.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
constexpr auto kCard = c10::DeviceType::PrivateUse1;
constexpr unsigned char kGarbage = 0xC5;
constexpr size_t kAlign = 512;
constexpr size_t kTotal = size_t{1} << 30;
const c10::Device kDevice(kCard, 0);

using Clock = std::map<int64_t, uint64_t>;  // stream -> how many of its works are known to be done

void merge(Clock& into, const Clock& other) {
  for (auto [stream, number] : other) into[stream] = std::max(into[stream], number);
}

struct Block {
  size_t nbytes;
  int64_t stream;  // on which it was asked for, and which has it back when it is freed
  Clock writes, uses;
  std::vector<int64_t> recorded;  // streams of record_stream
};

struct Work {
  uint64_t number;
  std::function<void()> run;
};

struct CardStream {
  uint64_t number = 0;
  Clock clock;
  std::deque<Work> deferred;

  void run_until(uint64_t last) {
    while (!deferred.empty() && deferred.front().number <= last) {
      deferred.front().run();
      deferred.pop_front();
    }
  }
};

struct CardEvent {
  int64_t stream;
  uint64_t number;
  Clock clock;
};

struct Card {
  std::recursive_mutex mutex;
  char* shown;   // where tensors' addresses lie
  char* memory;  // where operators find the same bytes
  size_t cap = kTotal, allocated = 0, peak = 0, copied = 0;
  std::map<size_t, size_t> gaps{{0, kTotal}};
  std::map<const char*, Block> blocks;
  std::map<const char*, size_t> pinned;
  std::deque<CardStream> streams{CardStream{}};
  Clock host;
  uint64_t races = 0;
  std::string last_race;

  Card() {
    const int file = memfd_create("card", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kTotal) == 0, "no memory for the simulated card");
    const int reach = std::getenv("CARD_UNIFIED") ? PROT_READ | PROT_WRITE : PROT_NONE;
    shown = static_cast<char*>(mmap(nullptr, kTotal, reach, MAP_SHARED, file, 0));
    memory = static_cast<char*>(mmap(nullptr, kTotal, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(shown != MAP_FAILED && memory != MAP_FAILED, "no addresses for the simulated card");
    close(file);
  }

  char* real(const void* address) {
    return address == nullptr ? nullptr : memory + (static_cast<const char*>(address) - shown);
  }

  Block* block_of(const void* address) {
    auto found = blocks.upper_bound(static_cast<const char*>(address));
    if (address == nullptr || found == blocks.begin()) return nullptr;
    --found;
    return static_cast<const char*>(address) < found->first + found->second.nbytes ? &found->second : nullptr;
  }

  void race(const std::string& what) {
    ++races;
    last_race = what;
  }
};

Card& card() {
  static Card* made = new Card;
  return *made;
}

thread_local int64_t current_stream = 0;

// -- order: each work is marked on the blocks that it reads and writes

Clock launch(int64_t stream) {
  auto& s = card().streams[stream];
  s.run_until(s.number);
  Clock known = s.clock;
  merge(known, card().host);
  ++s.number;
  s.clock = known;
  s.clock[stream] = s.number;
  return known;
}

bool unseen(const Clock& marks, int64_t stream, const Clock& known) {
  return std::any_of(marks.begin(), marks.end(), [&](auto& mark) {
    auto seen = known.find(mark.first);
    return mark.first != stream && mark.second > (seen == known.end() ? 0 : seen->second);
  });
}

bool mark_read(const void* address, int64_t stream, const Clock& known, const std::string& who) {
  Block* block = card().block_of(address);
  if (block == nullptr) return true;
  const bool good = !unseen(block->writes, stream, known);
  if (!good) card().race(who + " reads before it is written");
  block->uses[stream] = card().streams[stream].number;
  return good;
}

bool mark_write(const void* address, int64_t stream, const Clock& known, const std::string& who) {
  Block* block = card().block_of(address);
  if (block == nullptr) return true;
  const bool good = !unseen(block->writes, stream, known) && !unseen(block->uses, stream, known);
  if (!good) card().race(who + " writes while it is in use");
  block->writes[stream] = block->uses[stream] = card().streams[stream].number;
  return good;
}

void wait_by_host(int64_t stream, uint64_t number, const Clock& clock) {
  card().streams[stream].run_until(number);
  merge(card().host, clock);
}

void synchronize(int64_t stream) {
  auto& s = card().streams[stream];
  wait_by_host(stream, s.number, s.clock);
}

void wait_for(int64_t stream) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  synchronize(stream);
}

// -- memory

void give_back_pages(char* memory, size_t nbytes) {  // the host's, which has whole pages back
  constexpr size_t kPage = 4 << 10;
  std::memset(memory, kGarbage, nbytes);
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (start + kPage - 1) / kPage * kPage, last = (start + nbytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_REMOVE);
}

void give_back(void* address) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  auto found = card().blocks.find(static_cast<const char*>(address));
  auto run_all = [](int64_t stream) { card().streams[stream].run_until(card().streams[stream].number); };
  run_all(found->second.stream);  // whoever has this memory next comes after what that stream was given
  Clock known = card().streams[found->second.stream].clock;
  merge(known, card().host);
  for (int64_t stream : found->second.recorded) {  // it is given to nobody before they have passed here
    run_all(stream);
    merge(known, card().streams[stream].clock);
  }
  if (unseen(found->second.uses, found->second.stream, known)) card().race("memory is freed while another stream uses it");
  const size_t nbytes = (found->second.nbytes + kAlign - 1) / kAlign * kAlign;
  size_t start = static_cast<char*>(address) - card().shown, length = nbytes;
  if (std::getenv("CARD_UNIFIED")) give_back_pages(card().real(address), found->second.nbytes);
  else std::memset(card().real(address), kGarbage, found->second.nbytes);
  card().allocated -= nbytes;
  card().blocks.erase(found);
  auto& gaps = card().gaps;
  auto next = gaps.lower_bound(start);
  if (next != gaps.end() && start + length == next->first) {
    length += next->second;
    next = gaps.erase(next);
  }
  if (next != gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += length;
      return;
    }
  }
  gaps[start] = length;
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &ignore, kDevice};
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    const size_t nbytes = (asked + kAlign - 1) / kAlign * kAlign;
    auto& gaps = card().gaps;
    auto gap = std::find_if(gaps.begin(), gaps.end(), [&](auto& g) { return g.second >= nbytes; });
    TORCH_CHECK_WITH(
        OutOfMemoryError, gap != gaps.end() && card().allocated + nbytes <= card().cap, "card out of memory. Tried to allocate ",
        asked, " bytes; ", card().allocated, " of ", card().cap, " are in use");
    char* address = card().shown + gap->first;
    const auto [start, length] = *gap;
    gaps.erase(gap);
    if (length > nbytes) gaps[start + nbytes] = length - nbytes;
    card().allocated += nbytes;
    card().peak = std::max(card().peak, card().allocated);
    Block block{asked, current_stream, {}, {}, {}};
    block.uses[current_stream] = card().streams[current_stream].number;  // whoever had this memory before
    card().blocks[address] = std::move(block);
    std::memset(card().real(address), kGarbage, asked);
    return {address, address, &give_back, kDevice};
  }

  static void ignore(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memmove(card().real(to), card().real(from), count);
  }
};

void unpin(void* address) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  for (size_t k = 0; k < card().streams.size(); ++k) synchronize(k);
  auto found = card().pinned.find(static_cast<const char*>(address));
  munmap(address, found->second);
  card().pinned.erase(found);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    nbytes = std::max<size_t>(nbytes, 1);
    void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "no memory to pin");
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    card().pinned[static_cast<const char*>(address)] = nbytes;
    return {address, address, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

bool is_pinned(const void* address) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  auto found = card().pinned.upper_bound(static_cast<const char*>(address));
  if (found == card().pinned.begin()) return false;
  --found;
  return static_cast<const char*>(address) < found->first + found->second;
}

CardAllocator card_allocator;
PinnedAllocator pinned_allocator;

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DataPtr fresh = card_allocator.allocate(nbytes);
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  const Clock known = launch(current_stream);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept > 0) {
    mark_read(storage->data(), current_stream, known, "resize_");
    mark_write(fresh.get(), current_stream, known, "resize_");
    std::memcpy(card().real(fresh.get()), card().real(storage->data()), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

struct CardHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    card().streams.emplace_back();
    return stream_of(static_cast<int64_t>(card().streams.size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    auto& s = card().streams[stream.id()];
    delete static_cast<CardEvent*>(*event);
    *event = new CardEvent{stream.id(), s.number, s.clock};
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<CardEvent*>(event);
    if (e == nullptr) return;
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    card().streams[e->stream].run_until(e->number);
    merge(card().streams[stream.id()].clock, e->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<CardEvent*>(event);
    if (e == nullptr) return true;
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    auto& deferred = card().streams[e->stream].deferred;
    return deferred.empty() || deferred.front().number > e->number;
  }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<CardEvent*>(event);
    if (e == nullptr) return;
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    wait_by_host(e->stream, e->number, e->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<CardEvent*>(event); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    return card().streams[stream.id()].deferred.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    synchronize(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    for (size_t k = 0; k < card().streams.size(); ++k) synchronize(k);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    if (Block* block = card().block_of(data.get())) block->recorded.push_back(stream.id());
  }
  static c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

// -- operators: the CPU's kernel runs on tensors of the host that lie over the card's memory

Tensor lazily_like(Tensor made, const Tensor& like) {
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

bool on_card(const Tensor& t) { return t.defined() && t.device().type() == kCard; }

Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return lazily_like(std::move(made), like);
}

c10::Storage new_storage(size_t nbytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, card_allocator.allocate(nbytes), &card_allocator, true));
}

class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)), stream_(current_stream) {
    std::lock_guard<std::recursive_mutex> held(card().mutex);
    known_ = launch(stream_);
  }

  Tensor enter(const Tensor& t, bool reads, bool writes) {
    if (!on_card(t)) return t;
    TORCH_CHECK(!reads || t.numel() == 0 || t.storage().data() != nullptr || t._is_zerotensor(),
        "card error: an illegal memory access was encountered");
    auto* key = t.storage().unsafeGetStorageImpl();
    {
      std::lock_guard<std::recursive_mutex> held(card().mutex);
      if (reads) good_ &= mark_read(t.storage().data(), stream_, known_, name_);
      if (writes) good_ &= mark_write(t.storage().data(), stream_, known_, name_);
    }
    auto found = hosts_.find(key);
    if (found == hosts_.end()) {
      c10::DataPtr data(card().real(t.storage().data()), nullptr, &CardAllocator::ignore, c10::Device(c10::DeviceType::CPU));
      c10::Storage over(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true));
      found = hosts_.emplace(key, over).first;
      cards_.emplace(over.unsafeGetStorageImpl(), t.storage());
      views_of_.emplace(over.unsafeGetStorageImpl(), t);
    }
    Tensor made = tensor_over(found->second, c10::DispatchKey::CPU, t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    operands_.push_back({t, made, writes});
    return made;
  }

  Tensor leave(const Tensor& t) {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
    for (auto& [original, made, writes] : operands_)
      if (made.is_same(t)) return original;
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = cards_.find(key);
    if (found == cards_.end() && t.storage().data() == nullptr && t.numel() > 0) {  // a tensor of zeros without memory
      Tensor made = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(nullptr, kDevice), &card_allocator, true)),
          c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}), t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return made;
    }
    if (found == cards_.end()) {
      c10::Storage fresh = new_storage(t.storage().nbytes());
      {
        std::lock_guard<std::recursive_mutex> held(card().mutex);
        mark_write(fresh.data(), stream_, known_, name_);
      }
      if (t.storage().nbytes() > 0) std::memcpy(card().real(fresh.data()), t.storage().data(), t.storage().nbytes());
      if (!good_) std::memset(card().real(fresh.data()), kGarbage, t.storage().nbytes());
      found = cards_.emplace(key, fresh).first;
      kept_.push_back(t);  // or its storage's address comes again
    }
    auto of = views_of_.find(key);
    if (of == views_of_.end()) return tensor_over(found->second, c10::DispatchKey::PrivateUse1, t);
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(  // as its operand: not of inference mode if that is not
        c10::TensorImpl::VIEW, c10::Storage(found->second), of->second.key_set(), t.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    view._set_conj(t.is_conj());
    view._set_neg(t.is_neg());
    return view;
  }

  // what an operator made longer, given as `out=`, lies in the host's memory now
  void finish() {
    for (auto& [original, made, writes] : operands_) {
      if (!writes) continue;
      auto* storage = original.storage().unsafeGetStorageImpl();
      const size_t nbytes = made.storage().nbytes();
      if (nbytes != storage->nbytes()) {
        resize_storage(storage, nbytes);
        std::memcpy(card().real(storage->data()), made.storage().data(), nbytes);
      }
      if (made.sizes() != original.sizes() || made.strides() != original.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      if (!good_ && nbytes > 0) std::memset(card().real(storage->data()), kGarbage, nbytes);
    }
  }

 private:
  struct Operand {
    Tensor original, made;
    bool writes;
  };
  std::string name_;
  int64_t stream_;
  Clock known_;
  bool good_ = true;
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_, cards_;
  std::unordered_map<c10::StorageImpl*, Tensor> views_of_;
  std::vector<Operand> operands_;
  std::vector<Tensor> kept_;
};

c10::IValue entered(Call& call, const c10::IValue& value, bool reads, bool writes) {
  if (value.isTensor()) return call.enter(value.toTensor(), reads, writes);
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(call.enter(t, reads, writes));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector())
      made.push_back(t ? std::optional<Tensor>(call.enter(*t, reads, writes)) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kCard) return c10::Device(c10::DeviceType::CPU);
  return value;
}

c10::IValue left(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.leave(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(call.leave(t));
    return made;
  }
  return value;
}

void by_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const auto& returns = schema.returns();
  const bool views = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& r) {
    return r.alias_info() != nullptr && !r.alias_info()->isWrite();
  });
  Call call(schema.name());
  for (size_t k = 0; k < count; ++k) {
    const auto* alias = schema.arguments()[k].alias_info();
    auto& value = (*stack)[begin + k];
    value = entered(call, value, !views, alias != nullptr && alias->isWrite());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.finish();
  for (size_t k = stack->size() - returns.size(); k < stack->size(); ++k) (*stack)[k] = left(call, (*stack)[k]);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  const size_t nbytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      new_storage(nbytes), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  Tensor made = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pin);
  if (format) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), nbytes);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_at(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_at(self, std::move(source), 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) { return set_at(self, new_storage(0), 0, {0}, {1}); }

void defer_copy(const Tensor& source, const Tensor& target) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  const int64_t stream = current_stream;
  const Clock known = launch(stream);
  bool good = mark_read(source.storage().data(), stream, known, "a copy");
  good &= mark_write(target.storage().data(), stream, known, "a copy");
  const size_t nbytes = source.nbytes();
  auto place = [](const Tensor& t) {
    char* start = static_cast<char*>(t.storage().mutable_data());
    return (on_card(t) ? card().real(start) : start) + t.storage_offset() * t.itemsize();
  };
  char *to = place(target), *from = place(source);
  std::memset(to, kGarbage, nbytes);
  auto& s = card().streams[stream];
  s.deferred.push_back({s.number, [=] { good ? std::memmove(to, from, nbytes) : std::memset(to, kGarbage, nbytes); }});
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const Tensor& host = on_card(source) ? target : source;
  const bool across = on_card(source) != on_card(target);
  if (across) card().copied += target.nbytes();
  const bool plain = source.is_contiguous() && target.is_contiguous() && source.dtype() == target.dtype() &&
      source.sizes() == target.sizes() && source.nbytes() > 0 && source.is_conj() == target.is_conj() &&
      source.is_neg() == target.is_neg();
  if (!(across && non_blocking && plain && is_pinned(host.storage().data()))) {
    Call call("copy_");
    Tensor into = call.enter(target, false, true), out_of = call.enter(source, true, false);
    at::AutoDispatchBelowADInplaceOrView below;
    into.copy_(out_of);
    call.finish();
    if (across) wait_for(current_stream);
    return target;
  }
  defer_copy(source, target);
  return target;
}

at::Scalar scalar(const Tensor& self) {
  Call call("_local_scalar_dense");
  Tensor host = call.enter(self, true, false);
  wait_for(current_stream);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(host);
}

void record_stream(Tensor& self, c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  if (Block* block = card().block_of(self.storage().data())) block->recorded.push_back(stream.id());
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  Call call("convolution");
  std::optional<Tensor> b = bias && bias->defined() ? std::optional<Tensor>(call.enter(*bias, true, false)) : std::nullopt;
  Tensor on_x = call.enter(x, true, false), on_w = call.enter(w, true, false);
  at::AutoDispatchBelowADInplaceOrView below;
  return call.leave(at::convolution(on_x, on_w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Call call("convolution_backward");
  Tensor on_g = call.enter(g, true, false), on_x = call.enter(x, true, false), on_w = call.enter(w, true, false);
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t bias[] = {transposed ? w.size(1) * groups : w.size(0)};
  auto [gx, gw, gb] = at::convolution_backward(
      on_g, on_x, on_w, at::IntArrayRef(bias), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.leave(gx), call.leave(gw), call.leave(gb)};
}

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

const std::vector<std::string> kOwn{"copy_", "_copy_from", "_local_scalar_dense", "set_", "resize_", "empty", "empty_strided",
    "record_stream", "_fused_sdp_choice", "convolution_overrideable", "convolution_backward_overrideable"};

CardHooks hooks;
CardGuard guard;

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  // composite kernels of operators that have one for the CPU, too, would come before the fallback
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string base = name.name.substr(6);
    auto op = dispatcher.findOp(name);
    if (!op || std::find(kOwn.begin(), kOwn.end(), base) != kOwn.end()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      const std::string full = name.overload_name.empty() ? base : base + "." + name.overload_name;
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
    }
  }
}

// as for copy_, which asks for it
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// the rules of CUDA: products in the lower precision, sums and powers in 32 bits
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(exp, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(pow, Tensor_Scalar, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32_set_opt_dtype)
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, CardGuard)

extern "C" {
void card_register() {
  c10::SetAllocator(kCard, &card_allocator);
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
}
void card_cap(size_t nbytes) { card().cap = std::min(nbytes, kTotal); }
size_t card_allocated() { return card().allocated; }
size_t card_reserved() {  // up to the end of the last block, as nothing is moved together
  std::lock_guard<std::recursive_mutex> held(card().mutex);
  auto& blocks = card().blocks;
  if (blocks.empty()) return 0;
  return blocks.rbegin()->first - card().shown + (blocks.rbegin()->second.nbytes + kAlign - 1) / kAlign * kAlign;
}
size_t card_peak() { return card().peak; }
void card_reset_peak() { card().peak = card().allocated; }
size_t card_copied() { return card().copied; }
uint64_t card_races() { return card().races; }
const char* card_last_race() { return card().last_race.c_str(); }
void* card_memory(void* address) { return card().real(address); }
}
