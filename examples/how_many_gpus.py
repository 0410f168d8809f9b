"""How many L20s do these conversations need under SLOs, and what would carry more? A search; its runs are kept in DIR.

python examples/how_many_gpus.py [DIR]
"""

import sys
import tempfile

import kvtwin

question = {
    "workload": "azure-conv-2023",
    "num-prompts": 600,
    "clip": 4096,
    "model": "llama-2-7b",
    "gpu": ["l20"],
    "layouts": "engines",
    "tp": 1,
    "kv-cache-dtype": "auto",
    "max-num-batched-tokens": 2048,
    "max-num-seqs": 256,
    "max-gpus": 4,
    "seeds": 3,
    "slo": ["p99_ttft_ms:3000", "p99_tpot_ms:200"],
}
folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
print(kvtwin.plan(question, folder, jobs=1).text)
