"""Starting a run's ranks, and how it ends when one fails or a signal comes.

``launcher`` starts them, ``signals`` ends them, and ``failures`` says which error is the one to show.
"""
