"""ONNX files in and out: read within limits, converted, and compared with onnxruntime."""
