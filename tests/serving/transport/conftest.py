from transport_place import make_bundle, place

__all__ = ["make_bundle", "place"]
