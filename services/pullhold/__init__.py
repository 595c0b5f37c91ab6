"""The pullhold: holds pulls that found nothing. Start with ``__main__``, read ``holds`` first."""
