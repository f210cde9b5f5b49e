//! Collectives as NCCL has them, or composed of sends and receives where the loaded library is older.
