"""Names only."""


class Float8Tensor:
    """No tensor is one."""
