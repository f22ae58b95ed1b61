// What the kernels that work row by row share on their way to a launch.
#ifndef CUBIST_KERNELS_ROWWISE_H_
#define CUBIST_KERNELS_ROWWISE_H_

#include <initializer_list>

#include "kernels/choose_for.h"
#include "npu_model/device.h"
#include "npu_model/launch.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

// (N) as (N, 1). Not given stays not given.
template <class AnyTensor>
AnyTensor AsColumn(AnyTensor t) {
  if (t.rank == 1) t.rank = 2, t.sizes[1] = 1, t.strides[1] = 1;
  return t;
}

// The replay of a call whose time hangs on its shape and on how its tensors lie. run(device, tiling, profile) makes it.
template <class Run>
struct RowwiseReplay {
  // A price is up to a third off.
  static constexpr ShortListLimits kFamilies{.count = 16, .dearest = 2, .work = 100000}, kWalks{.count = 1};
  std::initializer_list<ConstTensor> tensors;
  const Run& run;

  Status operator()(const Device& model, const RowwiseTiling& tiling, Profile* profile) const {
    return run(model, tiling, profile);
  }
  void AddTo(ChoiceKey* key) const {
    for (const ConstTensor& tensor : tensors) key->Add(tensor);
  }
};

// A call of a kernel that chooses its tiling by replays of itself. body(launch, tiling) adds tensors and phases to its
// launch; `tensors` are those.
template <class Body>
Status RunRowwise(const Device& device, const char* kernel, const RowwiseShape& shape,
                  std::initializer_list<ConstTensor> tensors, Profile* profile, const Body& body) {
  const auto run = [&](const Device& on, const RowwiseTiling& tiling, Profile* of_run) {
    Launch launch(on, kernel);
    body(launch, tiling);
    return launch.Finish(of_run);
  };
  RowwiseTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kernel, shape, &RowwiseCandidates, &tiling,
                                   RowwiseReplay<decltype(run)>{tensors, run}));
  return run(device, tiling, profile);
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROWWISE_H_
