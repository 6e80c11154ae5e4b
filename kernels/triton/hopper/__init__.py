"""The Triton backend for compute capability 9.0, in Gluon: warp-specialised products with the loss inside."""
