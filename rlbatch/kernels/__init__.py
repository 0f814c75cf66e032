"""Operations that GPUs have kernels for here, each with the same by torch's operations. They know torch alone."""
