"""Runs in a bucket, by fsspec: `path.outputs=s3://BUCKET/FOLDER`. No torch here, and no fsspec before a URL is typed.

Everything else works on local folders: a run lies below `path.cache` while it is trained, and is mirrored to its URL.
Start with place.py: which folder stands for which URL. mirror.py uploads a run while it is trained; upload.py decides
what and in which order, claims.py who may.
"""
