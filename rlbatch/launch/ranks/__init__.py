"""Who a rank is: what launchers' variables say, the addresses of its node, the processes that belong to it."""
