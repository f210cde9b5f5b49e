// Bitwise folds of bytes, whatever the type of the elements: `count` is in bytes.
#include "fold.cuh"

FOLD(and_b8, LaneBits, And, 16, true, 4)
FOLD(or_b8, LaneBits, Or, 16, true, 4)
FOLD(xor_b8, LaneBits, Xor, 16, true, 4)
