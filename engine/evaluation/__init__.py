"""What comes after a run: its checkpoints as Hugging Face folders, responses of its models, and figures about them.

The commands ``engine.export``, ``engine.generate`` and ``engine.evaluate`` import ``settings``, ``checks``,
``entries``, ``places``, ``response_files`` and ``command`` before torch, and then ``exporting``, ``sampling`` or
``evaluating``.
"""
