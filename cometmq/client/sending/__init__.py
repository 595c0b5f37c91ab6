"""From a message to a receipt: queues chosen, records encoded, batches sent and sent again."""
