//! Memory that NCCL allocates, and registrations and windows over it.
