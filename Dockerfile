# Laya as a container: `docker build --target cpu -t laya:cpu .`, or `--target cuda -t laya:cuda`. How to run it: docs/deploy.md.
# scripts/check_dockerfile runs these steps without Docker, in roots that debootstrap makes.
ARG DEBIAN=trixie

# The wheel with the native core, and an environment of Laya and what it needs. Compilers stay in this stage.
FROM debian:${DEBIAN}-slim AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt lock.txt README.md LICENSE CMakeLists.txt ./
COPY csrc csrc
COPY laya laya
RUN python3 -m venv /opt/wheel \
 && /opt/wheel/bin/pip install --no-cache-dir --constraint constraints.txt build \
 && PIP_CONSTRAINT=/src/lock.txt /opt/wheel/bin/python -m build --wheel --outdir /wheels
# Without --system-site-packages nothing of Debian's Python but its standard library is used. pip stays: `laya pull` and
# `laya engines install` fetch and unpack by it. -I: not the sources beside it, in which there is no core.
RUN python3 -m venv /opt/laya \
 && /opt/laya/bin/pip install --no-cache-dir --constraint constraints.txt --constraint lock.txt /wheels/*.whl \
 && /opt/laya/bin/python -I -c "import laya._core"

# A build of llama.cpp for NVIDIA's cards, beside the one for CPUs. Which toolkits there are: `laya engines install --help`.
FROM build AS build-cuda
ARG CUDA_TOOLKIT=12.8
# A mirror of the index of these builds; empty: the one that their authors keep.
ARG ENGINE_INDEX=
RUN LAYA_HOME=/opt/engines /opt/laya/bin/laya engines install cuda --no-check --toolkit ${CUDA_TOOLKIT} \
      ${ENGINE_INDEX:+--index-url ${ENGINE_INDEX}}

# libgomp1: llama.cpp's wheel computes with it and does not bring it.
FROM debian:${DEBIAN}-slim AS cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates libgomp1 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --user-group --home-dir /var/lib/laya --shell /usr/sbin/nologin laya \
 && install -d -o laya -g laya -m 750 /var/lib/laya
COPY --from=build /opt/laya /opt/laya
ENV PATH=/opt/laya/bin:/usr/local/bin:/usr/bin:/bin LAYA_HOME=/var/lib/laya \
    PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /var/lib/laya
# Models, keys, conversations, logs: all that outlives a container.
VOLUME /var/lib/laya
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health needs no key, and answers while models load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python3", "-I", "-c", "import urllib.request as http; http.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["laya"]
# An open address needs a key: `laya key create` into the volume, or server.api_keys in a config.
CMD ["serve", "--host", "0.0.0.0"]

# The driver and its libraries come from the host, by NVIDIA's container toolkit: `docker run --gpus all`.
FROM cpu AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda --chown=10001:10001 /opt/engines/engines /var/lib/laya/engines
