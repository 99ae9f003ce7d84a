"""CuPy: FFTs, matrices, sorting and a kernel of its own, through CUDA's runtime."""

import cupy
from telling import tell

cupy.random.seed(0)
twice = cupy.RawKernel(
    'extern "C" __global__ void twice(float* a, int n)'
    "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) a[i] *= 2; }",
    "twice",
)
found = []
for _ in range(60):
    array = cupy.random.standard_normal((1024, 1024)).astype(cupy.float32)
    array = cupy.abs(cupy.fft.fft2(array)) @ array
    twice((4096,), (256,), (array, array.size))
    found.append(cupy.sort(array[0]))
tell(*(cupy.asnumpy(one) for one in found))
