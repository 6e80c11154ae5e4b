"""What a model's folder holds, read before any weights load; the digest that tells its weights from others; its kind;
the way to the hub.

Every module is for everybody.
"""
