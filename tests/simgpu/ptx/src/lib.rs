//! Executes PTX on the processor.
