"""What runs in SGLang's own processes: needs SGLang, what that needs, and of rlbatch only ``engines`` and ``collectives``."""
