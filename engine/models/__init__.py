"""What a model's folder holds, read before any weights load; the digest that tells its weights from others; its kind.

All modules are for everybody.
"""
