# A CMake toolchain file: the Python package ziglang, which is clang with a C and C++ library for each system.
#
#     cmake -S csrc -B FOLDER -DCMAKE_TOOLCHAIN_FILE=csrc/zig.cmake -DDIFFBIT_TARGET=x86_64-windows-gnu -DDIFFBIT_PYTHON=python3
#
#   DIFFBIT_TARGET   processor-system-abi as zig names them: x86_64- or aarch64-, then windows-gnu, linux-musl, or
#                    macos.11.0-none with the oldest release that shall load the library
#   DIFFBIT_PYTHON   a Python that has ziglang
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES DIFFBIT_TARGET DIFFBIT_PYTHON)

string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${DIFFBIT_TARGET}")
if(DIFFBIT_TARGET MATCHES "-windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER ${DIFFBIT_PYTHON})  # CMake wants one, and calls it for no file
elseif(DIFFBIT_TARGET MATCHES "-macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_INSTALL_NAME_TOOL "not needed")  # CMake wants one; the name is the same after the installation
  set(CMAKE_OSX_SYSROOT "")                  # ziglang's own
else()
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_EXE_LINKER_FLAGS_INIT -dynamic)  # a static program of musl loads no library
  set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)     # zig's C++ library brings 4 MB for debuggers
endif()
# -O3 here, so that zig compiles its C and C++ library once, and not another time for CMake's own checks
set(zig -target ${DIFFBIT_TARGET} -O3)
set(CMAKE_C_COMPILER ${DIFFBIT_PYTHON} -m ziglang cc ${zig})
set(CMAKE_CXX_COMPILER ${DIFFBIT_PYTHON} -m ziglang c++ ${zig})
set(CMAKE_STRIP "")  # the one of this machine does not know the other systems' files
