# syntax=docker/dockerfile:1
# An image that reads served versions, without torch (docs/serving.md). It has no server: copy yours in, or mount it. From the root of the
# repository:
#
#   docker build --file deploy/serving.Dockerfile --tag rowcast:serving .

ARG PYTHON=3.12.12-slim-trixie

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/rowcast
COPY deploy/serving.txt deploy/
RUN python -m pip --python /opt/rowcast/bin/python install --requirement deploy/serving.txt
COPY pyproject.toml README.md LICENSE ./
COPY rowcast rowcast
COPY job job
COPY runtime runtime
COPY protocol protocol
COPY prefetcher prefetcher
COPY serving serving
COPY trainer trainer
COPY analysis analysis
COPY deploy/*.py deploy/
RUN python -m pip --python /opt/rowcast/bin/python install --no-deps .

FROM python:${PYTHON}
RUN groupadd --gid 10001 rowcast \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rowcast \
    && install --directory --owner 10001 --group 10001 --mode 0750 /var/cache/rowcast
COPY --from=build /opt/rowcast /opt/rowcast
# Must be writable: /tmp, /var/cache/rowcast (compiled loops). Versions may be mounted read-only.
ENV PATH=/opt/rowcast/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/cache/rowcast/numba
USER 10001:10001
WORKDIR /job
CMD ["python", "-P", "-c", "import rowcast.serving"]
