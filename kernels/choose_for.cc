#include "kernels/choose_for.h"

#include <atomic>
#include <map>
#include <mutex>

#include "npu_model/chip_constants.h"
#include "npu_model/parallel.h"

namespace cubist {

void SideBySide(std::size_t count, const std::function<void(std::size_t)>& body) { ForEach(count, body); }

void ChoiceKey::Add(std::span<const std::int64_t> values) {
  Add(values.size());
  for (const std::int64_t value : values) Add(value);
}

void ChoiceKey::Add(const ConstTensor& tensor) {
  Add(tensor.rank), Add(tensor.dtype);
  for (int d = 0; d < tensor.rank; ++d) Add(tensor.size(d)), Add(tensor.stride(d));
}

void ChoiceKey::Add(const ChipSpec& chip) {
  Add(chip.name), Add(chip.pipes_overlap), Add(chip.concurrent_cores);
  for (const NamedConstant& constant : ConstantsOf(chip)) Add(constant.constant.value);
  // What only a table of one's own can change.
  for (const BufferSpec& buffer : chip.buffers) Add(buffer.fast), Add(buffer.alignment);
  Add(chip.mmad.m_step), Add(chip.mmad.narrow_m_step), Add(chip.mmad.n_step), Add(chip.mmad.k_bytes);
  Add(chip.vector.repeat_bytes);
  Add(chip.memory.l2_line), Add(chip.sync.vector_needs_barrier), Add(chip.sync.moves_need_barrier);
  Add(chip.sync.mmad_barrier_below);
  const ChipSpec::Packing& packing = chip.packing;
  Add(packing.a_width_bytes), Add(packing.b_width_bytes), Add(packing.b_width), Add(packing.a_in_place_bytes);
  Add(packing.few_columns_in_place), Add(packing.packs_few_columns), Add(packing.turns_near);
  Add(packing.a_line_bytes), Add(packing.row_multiple), Add(packing.narrow_element_bytes);
  Add(packing.native_bf16);
}

namespace {

struct Choices {
  static constexpr std::size_t kMost = 256;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const void>> known;
};

Choices& AllChoices() {
  static Choices choices;
  return choices;
}

}  // namespace

std::shared_ptr<const void> FindChoice(const ChoiceKey& key) {
  Choices& all = AllChoices();
  const std::scoped_lock lock(all.mutex);
  const auto known = all.known.find(key.bytes());
  return known == all.known.end() ? nullptr : known->second;
}

void KeepChoice(const ChoiceKey& key, std::shared_ptr<const void> tiling) {
  Choices& all = AllChoices();
  const std::scoped_lock lock(all.mutex);
  if (all.known.size() >= Choices::kMost) all.known.clear();
  all.known.insert_or_assign(key.bytes(), std::move(tiling));
}

Status ReplayCalls(const ChipSpec& chip, double known,
                   const std::function<Status(const Device&, std::size_t, Profile*)>& replay,
                   std::span<double> seconds) {
  std::vector<Status> statuses(seconds.size());
  // Which are given up depends on which end first, but never one of the quickest.
  std::atomic<double> bound = known;
  ForEach(seconds.size(), [&](std::size_t i) {
    Profile profile;
    statuses[i] = replay(Npu(chip, {.with_data = false, .give_up_s = bound.load()}), i, &profile);
    if (!statuses[i].ok()) return;
    seconds[i] = profile.time_s;
    double least = bound.load();
    while (seconds[i] < least && !bound.compare_exchange_weak(least, seconds[i])) {
    }
  });
  for (const Status& status : statuses) CUBIST_RETURN_IF_ERROR(status);
  return {};
}

}  // namespace cubist
