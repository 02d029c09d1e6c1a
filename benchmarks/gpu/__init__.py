"""The parts of ``benchmarks/gpu.py``. Import them only after TRITON_INTERPRET is set."""
