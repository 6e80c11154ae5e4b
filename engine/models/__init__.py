"""What a model's folder holds, read before any weights load, and the digest that tells its weights from others.

Every module is for everybody.
"""
