/* What nccl.h needs of C's header of this name, so that bindings are the same on every machine. */
#pragma once
#define INT_MAX __INT_MAX__
#define INT_MIN (-INT_MAX - 1)
