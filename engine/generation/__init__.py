"""Samplers behind one interface, transformers (``hf``) and vLLM (``vllm``), and the proof of the weights that they
hold.

Others import ``base`` and ``sampling`` for what a sampler is and is asked, ``equal_weights`` for the proof,
``shared_weights`` for weights that trainer and sampler share, ``vllm_patches`` to measure those; one of ``hf`` or
``vllm`` is made by ``engine.start`` and ``engine.evaluation`` alone.
"""
