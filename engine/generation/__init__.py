"""Samplers behind one interface: transformers (``hf``) and vLLM (``vllm``)."""
