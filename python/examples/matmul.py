import numpy as np

import cubist

a, b = np.ones((256, 512), np.float32), np.full((512, 128), 0.5, np.float32)
c = cubist.matmul(a, b)  # on this machine
print("c(0, 0) =", c[0, 0])

profile = cubist.npu("ascend910b2").matmul(a, b)  # the same kernel, as the model sees it on an Ascend 910B2
print(
    f"{profile['time_us']:.1f} us on {profile['chip']}, bound by {profile['bound']}, Cube busy {profile['cube_busy']:.0%}"
)
