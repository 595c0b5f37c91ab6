"""Workers share a queue of jobs, and acknowledge each one; a slow job asks for more time.

cometmq topic create SharedJobs
python -m examples.jobs
"""

import asyncio

from cometmq.client import Message, Producer, ReceivedMessage, SimpleConsumer

TOPIC, GROUP = "SharedJobs", "JobWorkers"
JOBS = 6

done: set[bytes] = set()


async def work(consumer: SimpleConsumer, job: ReceivedMessage) -> None:
    if job.body == b"job 0":
        await consumer.change_invisible_time(job, 60_000)  # it takes longer than the others
        await asyncio.sleep(0.2)
    await consumer.ack(job)  # what is not acknowledged is delivered again, to any worker
    done.add(job.body)
    print(f"{job.body.decode()} is done")


async def worker() -> None:
    async with SimpleConsumer(group=GROUP) as consumer:
        await consumer.subscribe(TOPIC)
        while len(done) < JOBS:
            for job in await consumer.receive(2, invisible_ms=10_000, wait_ms=500):
                await work(consumer, job)


async def main() -> None:
    async with Producer() as producer:
        for number in range(JOBS):
            await producer.send_and_wait(Message(TOPIC, f"job {number}".encode()))
    await asyncio.gather(*(worker() for _ in range(3)))


if __name__ == "__main__":
    asyncio.run(main())
