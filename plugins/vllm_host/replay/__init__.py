"""Weight syncs without vLLM's loaders: what they did in the first sync is recorded as copies, which later syncs repeat.

Why: vLLM's loaders are Python for every tensor. At 10.6 B parameters a sync through them takes 8.6 to 10 s, one that repeats the copies 0.8
to 1.5 s.

1. The first sync goes through the loaders, and is audited. ``recorder.Recorder`` sees every operator that touches weights meanwhile, and
   notes which slice of which sent tensor was copied to where in a parameter. ``borrowed_tensors`` lets the loaders read sent tensors where
   they lie, each in a storage of its own, by which the recorder tells them.
2. After it ``Recorder.plan`` makes a ``copy_plan.Plan`` of the layers of which the record explains everything, bit by bit; the others, say
   those whose weights are packed for a kernel, are named in it.
3. A later sync is a ``copy_plan.Replay``: the plan's copies, neighbours as one, and vLLM's loaders for the layers that it names. A tensor
   that the first sync did not have, or had otherwise, ends it; where a parameter lies elsewhere by then, the loaders do it all again.

What was recorded also says which pieces of sent tensors the modules hold: ``held_weights`` reads them back, for comparisons.

A sync that is audited, of a draft, or with vLLM's expert load balancing, goes through the loaders.
"""
