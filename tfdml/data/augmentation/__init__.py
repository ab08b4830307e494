"""The views of images: crops and augmentation in training, the one view of evaluation, resizing, policies, previews."""
