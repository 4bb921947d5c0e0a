"""CPU kernels in C, loaded with ctypes."""
