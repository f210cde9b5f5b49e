//! Element-wise folds on the processor.
