"""What comes after a run: its checkpoints as Hugging Face folders, responses of its models, pairs and figures of them.

The commands ``engine.export``, ``engine.generate``, ``engine.evaluate`` and ``engine.relabel`` import ``settings``,
``checks``, ``entries``, ``places``, ``pairs``, ``response_files`` and ``command`` before torch, and then ``exporting``,
``sampling``, ``evaluating`` or ``relabelling``.
"""
