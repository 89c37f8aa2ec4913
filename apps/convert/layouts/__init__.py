"""Layouts of other libraries, one file for each `quant_method`; quantize/layouts/ says what a layout is.

    gptq                 <linear>.qweight, .qzeros, .scales        GPTQModel, AutoGPTQ: 2, 3, 4 and 8 bits
    awq                  the same, packed along out_features       AutoAWQ: 4 bits, "gemm" and "gemv"
    compressed_tensors   <linear>.weight_packed, .weight_scale     llm-compressor, vLLM: integers of 2 to 8 bits
    bitsandbytes         <linear>.weight, .weight.absmax, ...      nf4 and fp4
    bitnet               <linear>.weight, .weight_scale            ternary

Codes, zero points and scales are converted to one of diffbit's formats (formats/) without rounding again.
"""
