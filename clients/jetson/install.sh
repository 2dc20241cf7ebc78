#!/usr/bin/env bash
# Sets up one Jetson: a peer under the system's Python, which has NVIDIA's torch, and beside it a
# SuperNode in an environment of its own, because Flower needs Python 3.11 and JetPack 6 has 3.10.
#
#   ./install.sh WHEEL [FOLDER]      WHEEL: flwr_moshpit-*.whl; FOLDER: ~/flwr-moshpit
#
# PEER_PYTHON and SUPERNODE_PYTHON name other interpreters. Running it again repairs.
set -euo pipefail

wheel=${1:?"usage: $0 WHEEL [FOLDER]"}
folder=${2:-$HOME/flwr-moshpit}
peer_python=${PEER_PYTHON:-/usr/bin/python3}
supernode_python=${SUPERNODE_PYTHON:-python3.11}

fail() { echo "install.sh: $*" >&2; exit 1; }

"$peer_python" -c "import torch" 2>/dev/null \
    || fail "$peer_python has no torch: install NVIDIA's wheel for this JetPack first"
"$supernode_python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null \
    || fail "$supernode_python is no Python 3.11: apt install python3.11 python3.11-venv"

# The vendor's torch satisfies the requirement, so that pip leaves it alone.
"$peer_python" -m venv --system-site-packages "$folder/peer"
"$folder/peer/bin/pip" install --quiet "$wheel"

"$supernode_python" -m venv "$folder/supernode"
"$folder/supernode/bin/pip" install --quiet "$wheel"

"$folder/peer/bin/flwr-moshpit" doctor
"$folder/peer/bin/python" -c "import torch; print('CUDA in the peer:', torch.cuda.is_available())"
echo "peer-python is $folder/peer/bin/python"
