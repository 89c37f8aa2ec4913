// The table of instruction sets, which csrc/CMakeLists.txt writes for other processors.
#define DIFFBIT_ISAS(X, more) X(wasm128, more)
