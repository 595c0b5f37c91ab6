import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** The commands of bench/peers/load.py, for RocketMQ's Java client. */
public final class Load {
    static final int QUEUES = 8;
    static final int BATCH_MESSAGES = 1024;
    static final int BATCH_THREADS = 4;
    static final int THREADS_MAX = 64; // more callers than that send asynchronously
    static final int DUE_BYTES = 12; // long due_ns, int counts
    static final long WARM_UP_NS = 500_000_000L;

    final String namesrv;
    final AtomicInteger names = new AtomicInteger();
    final AtomicLong refused = new AtomicLong();

    Load(String namesrv) {
        this.namesrv = namesrv;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(new PrintStream(OutputStream.nullOutputStream()));
        Load load = new Load(arguments[0]);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split("\t");
            Map<String, String> fields = new HashMap<>();
            for (int at = 1; at < words.length; at++) {
                int equals = words[at].indexOf('=');
                fields.put(words[at].substring(0, equals), words[at].substring(equals + 1));
            }
            load.run(words[0], fields);
        }
        System.exit(0);
    }

    void run(String command, Map<String, String> fields) throws Exception {
        String topic = fields.get("topic");
        switch (command) {
            case "create": create(topic); break;
            case "call": call(topic, fields); break;
            case "batch": batch(topic, fields); break;
            case "consume": consume(topic, fields); break;
            case "schedule": schedule(topic, fields); break;
            case "receive": receive(topic, fields); break;
            case "drop": say("{\"dropped\": 0}"); break; // its log files go by age
            default: throw new IllegalArgumentException(command);
        }
    }

    static final PrintStream OUT = System.out; // nothing but the lines of the commands

    static synchronized void say(String line) {
        OUT.println(line);
        OUT.flush();
    }

    static void sayStarted() {
        say("{\"started\": 1}");
    }

    DefaultMQProducer producer() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("load");
        producer.setNamesrvAddr(namesrv);
        producer.setInstanceName("producer-" + names.incrementAndGet());
        producer.setDefaultTopicQueueNums(QUEUES);
        producer.start();
        return producer;
    }

    void create(String topic) throws Exception {
        DefaultMQProducer producer = producer();
        for (int tries = 0; ; tries++) {
            try {
                producer.createTopic("TBW102", topic, QUEUES, new HashMap<>());
                producer.fetchPublishMessageQueues(topic);
                break;
            } catch (Exception error) { // the broker has not registered, or not again after a pause
                if (tries == 300) throw error;
                Thread.sleep(100);
            }
        }
        producer.shutdown();
        say("{\"created\": 1}");
    }

    // --- one message a call ---------------------------------------------------------------------

    void call(String topic, Map<String, String> fields) throws Exception {
        int callers = Integer.parseInt(fields.get("callers"));
        byte[] body = new byte[Integer.parseInt(fields.get("body_bytes"))];
        DefaultMQProducer producer = producer();
        callFor(producer, topic, body, callers, WARM_UP_NS);
        sayStarted();
        say(callFor(producer, topic, body, callers, seconds(fields)).line());
        producer.shutdown();
    }

    Took callFor(DefaultMQProducer producer, String topic, byte[] body, int callers, long ns) throws Exception {
        return callers > THREADS_MAX
            ? callAsync(producer, topic, body, callers, ns)
            : inThreads(callers, ns, () -> check(producer.send(new Message(topic, body))) ? 1 : 0);
    }

    Took callAsync(DefaultMQProducer producer, String topic, byte[] body, int callers, long ns) throws Exception {
        Took took = new Took();
        Semaphore free = new Semaphore(callers);
        long end = System.nanoTime() + ns;
        while (System.nanoTime() < end) {
            free.acquire();
            long started = System.nanoTime();
            producer.send(new Message(topic, body), new SendCallback() {
                @Override public void onSuccess(SendResult result) {
                    if (check(result)) took.add(1, System.nanoTime() - started);
                    free.release();
                }
                @Override public void onException(Throwable error) {
                    refused.incrementAndGet();
                    free.release();
                }
            });
        }
        free.acquire(callers);
        return took;
    }

    // --- batches --------------------------------------------------------------------------------

    void batch(String topic, Map<String, String> fields) throws Exception {
        byte[] body = new byte[Integer.parseInt(fields.get("body_bytes"))];
        DefaultMQProducer producer = producer();
        long warm = batchFor(producer, topic, body, WARM_UP_NS).messages;
        sayStarted();
        Took took = batchFor(producer, topic, body, seconds(fields));
        took.stored = warm + took.messages;
        say(took.line());
        producer.shutdown();
    }

    Took batchFor(DefaultMQProducer producer, String topic, byte[] body, long ns) throws Exception {
        return inThreads(BATCH_THREADS, ns, () -> {
            List<Message> messages = new ArrayList<>(BATCH_MESSAGES);
            for (int at = 0; at < BATCH_MESSAGES; at++) messages.add(new Message(topic, body));
            return check(producer.send(messages)) ? BATCH_MESSAGES : 0;
        });
    }

    // --- consuming ------------------------------------------------------------------------------

    DefaultMQPushConsumer consumer(String topic, String way) throws Exception {
        String name = "consumer-" + System.nanoTime();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(name);
        consumer.setNamesrvAddr(namesrv);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (way.equals("tuned")) {
            consumer.setPullBatchSize(1024);
            consumer.setConsumeMessageBatchMaxSize(256);
            consumer.setPullThresholdForQueue(65_535);
        }
        consumer.subscribe(topic, "*");
        return consumer;
    }

    void consume(String topic, Map<String, String> fields) throws Exception {
        long count = Long.parseLong(fields.get("count"));
        int bodyBytes = Integer.parseInt(fields.get("body_bytes"));
        AtomicLong received = new AtomicLong();
        AtomicLong unmeasured = new AtomicLong();
        AtomicBoolean started = new AtomicBoolean();
        CountDownLatch complete = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = consumer(topic, fields.get("way"));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                if (message.getBody().length != bodyBytes) throw new IllegalStateException("body");
            }
            long now = received.addAndGet(messages.size());
            if (started.compareAndSet(false, true)) {
                unmeasured.set(now);
                sayStarted();
            }
            if (now >= count) complete.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        complete.await();
        say(String.format("{\"messages\": %d}", received.get() - unmeasured.get()));
        consumer.shutdown();
    }

    // --- latency --------------------------------------------------------------------------------

    void schedule(String topic, Map<String, String> fields) throws Exception {
        double rate = Double.parseDouble(fields.get("rate"));
        int warmUp = Integer.parseInt(fields.get("warm_up"));
        int count = Integer.parseInt(fields.get("count"));
        int bodyBytes = Integer.parseInt(fields.get("body_bytes"));
        DefaultMQProducer producer = producer();
        CountDownLatch acked = new CountDownLatch(warmUp + count);
        long interval = (long) (1e9 / rate);
        long start = System.nanoTime() + interval;
        for (int number = 0; number < warmUp + count; number++) {
            long due = start + number * interval;
            for (long now = System.nanoTime(); now < due; now = System.nanoTime()) LockSupport.parkNanos(due - now);
            if (number == warmUp) sayStarted();
            byte[] body = new byte[bodyBytes];
            ByteBuffer.wrap(body).putLong(due).putInt(number >= warmUp ? 1 : 0);
            producer.send(new Message(topic, body), new SendCallback() {
                @Override public void onSuccess(SendResult result) {
                    check(result);
                    acked.countDown();
                }
                @Override public void onException(Throwable error) {
                    throw new IllegalStateException(error);
                }
            });
        }
        acked.await();
        producer.shutdown();
        say(String.format("{\"messages\": %d}", count));
    }

    void receive(String topic, Map<String, String> fields) throws Exception {
        int count = Integer.parseInt(fields.get("count"));
        Took took = new Took();
        CountDownLatch complete = new CountDownLatch(count);
        DefaultMQPushConsumer consumer = consumer(topic, fields.get("way"));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                ByteBuffer body = ByteBuffer.wrap(message.getBody());
                long due = body.getLong();
                if (body.getInt() == 0) continue;
                took.add(1, now - due);
                complete.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        say("{\"ready\": 1}");
        complete.await();
        say(took.line());
        consumer.shutdown();
    }

    // --- common ---------------------------------------------------------------------------------

    static long seconds(Map<String, String> fields) {
        return (long) (Double.parseDouble(fields.get("seconds")) * 1e9);
    }

    boolean check(SendResult result) {
        boolean stored = result.getSendStatus() == SendStatus.SEND_OK;
        if (!stored) refused.incrementAndGet();
        return stored;
    }

    interface Send {
        /** Messages acknowledged. */
        int once() throws Exception;
    }

    /** So many threads, each of which sends again as soon as its call has returned. */
    Took inThreads(int count, long ns, Send send) throws Exception {
        Took took = new Took();
        long end = System.nanoTime() + ns;
        Thread[] threads = new Thread[count];
        for (int at = 0; at < count; at++) {
            threads[at] = new Thread(() -> {
                while (System.nanoTime() < end) {
                    long started = System.nanoTime();
                    try {
                        int messages = send.once();
                        if (messages > 0) took.add(messages, System.nanoTime() - started);
                    } catch (Exception error) { // a busy broker refuses: the next call is the retry
                        refused.incrementAndGet();
                    }
                }
            });
            threads[at].start();
        }
        for (Thread thread : threads) thread.join();
        return took;
    }

    /** How many messages, and what each call or message took. */
    final class Took {
        long messages;
        long stored;
        long[] ns = new long[1 << 16];
        int calls;

        synchronized void add(int count, long tookNs) {
            if (calls == ns.length) ns = Arrays.copyOf(ns, calls * 2);
            ns[calls++] = tookNs;
            messages += count;
        }

        synchronized double ms(double fraction) {
            return ns[Math.max((int) Math.ceil(fraction * calls), 1) - 1] / 1e6;
        }

        synchronized String line() {
            if (calls == 0) throw new IllegalStateException("no call succeeded");
            Arrays.sort(ns, 0, calls);
            return String.format(Locale.ROOT,
                "{\"messages\": %d, \"stored\": %d, \"refused\": %d, \"p50_ms\": %f, \"p99_ms\": %f, \"p999_ms\": %f, \"max_ms\": %f}",
                messages, stored, refused.getAndSet(0), ms(0.5), ms(0.99), ms(0.999), ms(1.0));
        }
    }
}
