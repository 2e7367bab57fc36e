# docker build -t neo-desktop .                                    (CPU)
# docker build -t neo-desktop --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
# docker run -p 127.0.0.1:8000:8000 -e NEO_DESKTOP_API_KEY=choose-one -v neo-desktop:/data neo-desktop    (--gpus all)
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir 'torch>=2.11,<2.14' --index-url "$TORCH_INDEX"
COPY . /src
RUN /venv/bin/pip install --no-cache-dir '/src[all]'

FROM python:3.12-slim
# Triton compiles a small C module for the GPU at the first start.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
RUN useradd --create-home user && mkdir /data && chown user /data
USER user
ENV NEO_DESKTOP_DATA=/data NEO_DESKTOP_CACHE=/data/cache
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=120s \
    CMD ["/venv/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["/venv/bin/neo-desktop"]
CMD ["chat", "--no-browser", "--host", "0.0.0.0"]
