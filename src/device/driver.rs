//! The CUDA driver: whether it is there with everything we call, and the device a communicator uses.
