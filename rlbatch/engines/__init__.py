"""What rollout backends need whose engine runs in a process of its own: the process, the frames to it, the memory for weights.

The engine's interpreter imports ``host``, ``protocol``, ``transfer.receiver`` and what these import. It may lack all that rlbatch depends
on: they need the standard library, and ``transfer.receiver`` torch.
"""
