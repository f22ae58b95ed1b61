// ChooseAttention: ChooseFor for both passes of attention.
#ifndef CUBIST_KERNELS_ATTENTION_CHOICE_H_
#define CUBIST_KERNELS_ATTENTION_CHOICE_H_

#include <vector>

#include "kernels/choose_for.h"
#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/launch.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// The replay of an attention call. What its time hangs on besides the shape is how tensors lie, and which keys the rows of
// each sequence see.
template <class Args, class Run>
struct AttentionReplay {
  static constexpr ShortListLimits kFamilies{.count = 12, .work = 600000}, kWalks{.count = 6, .work = 300000};
  const char* kernel;
  const Args& args;
  const Run& run;

  template <class Tiling>
  Status operator()(const Device& model, const Tiling& tiling, Profile* profile) const {
    return RunLaunch(model, kernel, {}, profile, [&](Launch& launch) { return run(model, launch, tiling); });
  }
  void AddTo(ChoiceKey* key) const {
    for (const ConstTensor& t :
         {args.q, args.k, args.v, args.q_rope, args.k_rope, ConstTensor(args.out), ConstTensor(args.lse),
          args.bias, args.sinks, args.mask, args.rope.cos, args.rope.sin, args.alibi.slopes})
      key->Add(t);
    for (const auto values : {args.prefix, args.lengths.q_ends, args.lengths.kv_ends}) key->Add(values);
    key->Add(args.causal);
    if (!args.window) return;
    key->Add(args.window->anchor);
    for (const auto& side : {args.window->left, args.window->right})
      key->Add(side.has_value()), key->Add(side.value_or(0));
  }
};

// run(device, launch, tiling) makes the call `args` with a tiling. Positions of rope are data, of which a tiling may not
// depend: with them the price alone decides.
template <class Shape, class Tiling, class Args, class Run>
Status ChooseAttention(const Device& device, const char* kernel, const Shape& shape,
                       std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), Tiling* tiling,
                       const Args& args, const Run& run) {
  if (args.rope.q_positions.given() || args.rope.k_positions.given())
    return ChooseFor(device, kernel, shape, candidates, tiling);
  return ChooseFor(device, kernel, shape, candidates, tiling, AttentionReplay<Args, Run>{kernel, args, run});
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_CHOICE_H_
