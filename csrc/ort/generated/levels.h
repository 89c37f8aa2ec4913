// Written by python -m diffbit.ops.schema, from ops/schema.py: change that.
#pragma once

// Lists for codes of 2, 3 and 4 bits (ops/kv_cache.py)
#define DIFFBIT_CACHE_LEVELS_2 -127, -38, 38, 127
#define DIFFBIT_CACHE_LEVELS_3 -127, -79, -45, -14, 14, 45, 79, 127
#define DIFFBIT_CACHE_LEVELS_4 -127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127
#define DIFFBIT_CACHE_THRESHOLDS_2 -0.9816f, 0.0f, 0.9816f
#define DIFFBIT_CACHE_THRESHOLDS_3 -1.748f, -1.05f, -0.5006f, 0.0f, 0.5006f, 1.05f, 1.748f
#define DIFFBIT_CACHE_THRESHOLDS_4 -2.4008f, -1.8435f, -1.4371f, -1.0993f, -0.7996f, -0.5224f, -0.2582f, 0.0f, 0.2582f, 0.5224f, 0.7996f, 1.0993f, 1.4371f, 1.8435f, 2.4008f
