"""What comes after a run: its checkpoints as model folders, responses of its models, a judge served, pairs and figures.

The commands at the top import ``settings``, ``checks``, ``entries``, ``places``, ``pairs``, ``response_files``,
``reward_server`` and ``command`` before torch, and then ``exporting``, ``sampling``, ``serving``, ``relabelling`` or
``evaluating``.
"""
