"""What a run asks of the machines that it runs on: ranks and devices, messages between them, child processes, disk.

Every module is for everybody; what comes of a failing rank is ``engine.launch``'s.
"""
