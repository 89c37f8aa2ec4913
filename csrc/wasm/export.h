// Functions that JavaScript calls.
#pragma once

#define EXPORT(name) extern "C" __attribute__((export_name("diffbit_" #name)))
