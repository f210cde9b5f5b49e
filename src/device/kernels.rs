//! Our kernels on one device: the images, loaded once, and how each is launched.
