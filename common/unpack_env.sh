#!/bin/bash
# Unpacks an environment (candle_p1/cluster/staging.py) on a node: unpack_env.sh ARCHIVE DIRECTORY.
# All ranks start it; one of each node does the work. Its Python then has to start from there.
set -euo pipefail
archive=$1 directory=$2 part=$2.part

mkdir "$directory.lock" 2>/dev/null || {
  [[ -d $directory.lock ]] && exit 0 # another rank of this node unpacks
  echo "$(uname -n): cannot write in ${directory%/*}" >&2
  exit 1
}
mkdir "$part"
tar --extract --file "$archive" --directory "$part" || {
  echo "$(uname -n): cannot unpack $archive in ${directory%/*}, which may be full" >&2
  exit 1
}
if [[ -d $part/base ]]; then # else the environment uses the operating system's Python
  sed -i "s|^home = .*|home = $directory/base/bin|" "$part/venv/pyvenv.cfg"
fi
mv "$part" "$directory"
[[ $archive != "$directory".* ]] || rm -f "$archive" # the node's own copy
export LD_LIBRARY_PATH="$directory/venv/lib:$directory/base/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="$directory/root"
check='import sys, candle_p1
sys.exit(not all(path.startswith(sys.argv[1] + "/") for path in (sys.prefix, candle_p1.__file__)))'
cd "$directory" # where no other candle_p1 is
"$directory/venv/bin/python" -c "$check" "$directory" || {
  echo "$(uname -n): the Python in $directory does not start from there" >&2
  exit 1
}
