#!/usr/bin/env bash
# Builds the wheel and the source distribution of HEAD, the same bytes each time:
#
#   bash scripts/release.sh [FOLDER]      into FOLDER (default: dist), with SHA256SUMS
#
# What is not committed is not in it. Times are the commit's; SOURCE_DATE_EPOCH overrides them. Who
# compares bytes needs the setuptools, wheel and zlib of this build: constraints.txt has the versions.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
die() {
  printf '[release] %s\n' "$*" >&2
  exit 1
}
mkdir -p "${1:-$root/dist}"
out="$(cd "${1:-$root/dist}" && pwd)"
cd "$root"
sha="$(git rev-parse --verify --quiet HEAD)" && [[ "$(git rev-parse --show-toplevel)" == "$(pwd -P)" ]] ||
  die "needs a git checkout, to build what is committed; pip wheel . builds from any folder"
changed="$(git status --porcelain --untracked-files=no)"
[[ -z "$changed" ]] || die "commit or undo first: $changed"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
version="$(cd ds_usp && python -c 'import _version; print(_version.BASE)')"
for tag in $(git tag --points-at HEAD 'v*'); do
  [[ "$tag" == "v$version" ]] || die "the tag $tag is at version $version of ds_usp/_version.py"
done

export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}" LC_ALL=C
umask 022 # the modes of files are in both archives
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree" "$work/out"
git -c tar.umask=0022 archive HEAD | tar -x -C "$work/tree" --no-same-permissions
printf '%s\n' "$sha" >"$work/tree/ds_usp/commit.txt"
cd "$work/tree"
# setuptools writes the clock, the user and the order of a folder into an archive; GNU tar need not.
python setup.py --quiet sdist --keep-temp --formats=tar --dist-dir "$work/ignored" 2>"$work/log" ||
  die "$(<"$work/log")"
name="$(basename "$work"/ignored/*.tar .tar)"
tar -c --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
  "$name" | gzip -9n >"$work/out/$name.tar.gz"
# The wheel is built from the source distribution, as an installer builds it.
python -m pip --disable-pip-version-check --no-input wheel --quiet --no-deps --no-build-isolation \
  --no-cache-dir --wheel-dir "$work/out" "./$name"
cd "$work/out"
sha256sum -- * | tee "$out/SHA256SUMS"
mv -- * "$out"
