"""The clients in a program without asyncio, a web application's worker say.

cometmq topic create Jobs
python -m examples.without_asyncio
"""

import threading

from cometmq.client import Message, ReceivedMessage
from cometmq.client.sync import Producer, PullConsumer, PushConsumer
from cometmq.errors import TopicNotFound

TOPIC, COUNT = "Jobs", 10
done: set[str] = set()
all_done = threading.Event()


def work(messages: list[ReceivedMessage]) -> None:
    done.update(message.body.decode() for message in messages)
    if len(done) == COUNT:
        all_done.set()


def main() -> None:
    with Producer() as producer:
        futures = [producer.send(Message(TOPIC, b"job %d" % number)) for number in range(COUNT)]
        receipts = [future.result() for future in futures]  # or its error is raised
        print(f"stored {len(receipts)} jobs")
        try:
            producer.send_and_wait(Message("NoSuchTopic", b""))
        except TopicNotFound as error:
            print("refused:", error.name())
    with PushConsumer(group="Workers", listener=work) as consumer:
        consumer.subscribe(TOPIC)
        all_done.wait()
    print(f"did {len(done)} jobs")
    with PullConsumer(group="Audit") as consumer:
        consumer.assign(consumer.queues(TOPIC))
        seen = 0
        while seen < COUNT:
            seen += len(consumer.poll())
        consumer.commit()
    print(f"saw {seen} jobs")


if __name__ == "__main__":
    main()
