import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.DataVersion;
import org.apache.rocketmq.common.protocol.body.ConsumerOffsetSerializeWrapper;
import org.apache.rocketmq.common.protocol.body.SubscriptionGroupWrapper;
import org.apache.rocketmq.common.protocol.body.TopicConfigSerializeWrapper;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** What is particular to 4.9: how a store is made, and the tables under config/. */
final class Engine {
    private Engine() {}

    static DefaultMessageStore make(MessageStoreConfig config) throws IOException {
        return new DefaultMessageStore(
            config, new BrokerStatsManager("compat", false), (a, b, c, d, e, f, g) -> {}, new BrokerConfig());
    }

    /** The store itself sends delayed messages to their queue. */
    static void delay(MessageExtBrokerInner message) {}

    /** Delivers what is due of the delayed messages, as a broker does, and writes delayOffset.json. */
    static void deliver(DefaultMessageStore store, long millis) throws Exception {
        store.handleScheduleMessageService(BrokerRole.SYNC_MASTER);
        Thread.sleep(millis);
        store.getScheduleMessageService().shutdown();
        store.getScheduleMessageService().persist();
    }

    static List<Table> tables(Path config) {
        return List.of(topics(config), groups(config), offsets(config));
    }

    private static Table topics(Path config) {
        TopicConfigSerializeWrapper table = new TopicConfigSerializeWrapper();
        table.setTopicConfigTable(new ConcurrentHashMap<>());
        table.setDataVersion(new DataVersion());
        return new Table(config.resolve("topics.json"), "topic", json -> {
            var read = RemotingSerializable.fromJson(json, TopicConfigSerializeWrapper.class);
            table.setTopicConfigTable(read.getTopicConfigTable());
            table.setDataVersion(read.getDataVersion());
        }, table::toJson, command -> {
            Table.putTopic(table.getTopicConfigTable(), command);
            table.getDataVersion().nextVersion();
        });
    }

    private static Table groups(Path config) {
        SubscriptionGroupWrapper table = new SubscriptionGroupWrapper();
        table.setSubscriptionGroupTable(new ConcurrentHashMap<>());
        table.setDataVersion(new DataVersion());
        return new Table(config.resolve("subscriptionGroup.json"), "group", json -> {
            var read = RemotingSerializable.fromJson(json, SubscriptionGroupWrapper.class);
            table.setSubscriptionGroupTable(read.getSubscriptionGroupTable());
            table.setDataVersion(read.getDataVersion());
        }, table::toJson, command -> {
            SubscriptionGroupConfig group = new SubscriptionGroupConfig();
            group.setGroupName(command.get("name"));
            group.setRetryMaxTimes(command.number("retries", 16));
            table.getSubscriptionGroupTable().put(group.getGroupName(), group);
            table.getDataVersion().nextVersion();
        });
    }

    private static Table offsets(Path config) {
        ConsumerOffsetSerializeWrapper table = new ConsumerOffsetSerializeWrapper();
        table.setOffsetTable(new ConcurrentHashMap<>());
        return new Table(config.resolve("consumerOffset.json"), "offset", json -> {
            var read = RemotingSerializable.fromJson(json, ConsumerOffsetSerializeWrapper.class);
            table.setOffsetTable(read.getOffsetTable());
        }, table::toJson, command -> Table.putOffset(table.getOffsetTable(), command));
    }
}
